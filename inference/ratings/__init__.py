"""Ratings of responses: the file that people's choices are kept in, and what follows from them."""
