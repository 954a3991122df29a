"""How well a model does on tasks that programs check: GSM8K, IFEval, sums, the embedded task."""
