"""Why adapting in latent space works: what Sections 4.5 and 4.6 of the paper look at, for any trained model."""
