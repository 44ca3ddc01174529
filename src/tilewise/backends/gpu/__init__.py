"""What the GPU backends share: kernel calls described without tensors, compiled from types alone, launched directly."""
