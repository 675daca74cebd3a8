"""Records of our own models, made from outside by hooks: attention, probes, ablation and gradients."""
