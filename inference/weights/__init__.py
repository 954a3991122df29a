"""The weights that generate: replica, hash, tensor-parallel shards."""
