"""DeepSpeed configuration files, read as settings of ours."""
