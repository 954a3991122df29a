"""Reading the rows of data paths and converting them to examples."""
