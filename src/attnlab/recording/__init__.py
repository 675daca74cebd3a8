"""Watching models of ours from outside: records, probes, ablation and gradients."""
