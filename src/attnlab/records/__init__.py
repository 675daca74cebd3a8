"""The Record: plain tensors of one forward pass, and how they are stored."""
