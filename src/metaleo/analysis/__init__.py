"""Why adapting in latent space works: what Sections 4.4 and 4.5 of the paper look at, for any trained model."""
