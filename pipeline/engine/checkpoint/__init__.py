"""Checkpoints: directories of safetensors files, each directory created atomically.

    ROOT/step_00000120/manifest.json                      the files' checksums and the run's state
    ROOT/step_00000120/rank-00000-of-00002.safetensors    one file per process
    ROOT/base-<job>/                                      the same for frozen weights, written once
    ROOT/latest                                           the name of the newest directory
    ROOT/.writing-*, ROOT/.removing-*                     incomplete, or being deleted

A checkpoint is a set of fragments: elements `a` to `b` of a flattened tensor, stored under the
tensor's name in any process's file. Any number of processes can therefore read it, however they
shard the tensors. Nothing is pickled.
"""
