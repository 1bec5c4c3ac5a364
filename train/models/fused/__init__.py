"""Parts of a layer in one Pallas kernel each way, where the compiler of GPUs makes several that pass over the data."""
