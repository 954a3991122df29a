"""Training on token files: which rows they have, in which order, what is held out."""
