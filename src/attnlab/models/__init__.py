"""Models that contain attention mechanisms: Transformers and LSTMs."""
