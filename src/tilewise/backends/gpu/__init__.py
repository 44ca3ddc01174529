"""What the GPU backends share: kernel calls described without tensors, compiled by types, launched by the driver."""
