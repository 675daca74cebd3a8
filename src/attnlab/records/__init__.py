"""The Record: plain tensors of one forward pass, and how to save and load them."""
