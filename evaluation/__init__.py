"""Evaluation of a model on tasks graded by programs: GSM8K, IFEval, arithmetic, embedded."""
