"""The networks of LEO (encoder, relation net and decoder), and the heads that learners produce."""
