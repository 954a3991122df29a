"""Checkpoints: directories that hold what was saved, bit for bit, or are not offered.

    ROOT/step_00000120/manifest.json                      what there is, and the CRC-32 of it all
    ROOT/step_00000120/rank-00000-of-00002.safetensors    one file of each process
    ROOT/base-<hash>/                                     the same of frozen weights, written once
    ROOT/latest                                           the name of the directory saved last
    ROOT/.writing-*, ROOT/.removing-*                     in the making, and on the way out

A checkpoint is a bag of fragments: elements `a` to `b` of a flattened tensor, under the tensor's
key, in whichever process's file. So it can be read by any number of processes that cut tensors in
any other way. Nothing is pickled.
"""
