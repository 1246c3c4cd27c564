"""Episodes as training data: samples and batches. No algorithm, no model."""
