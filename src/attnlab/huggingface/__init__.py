"""The one door to transformers: record, adapt, load and fine-tune Hugging Face models."""
