"""The only room that uses transformers: record, adapt, load and fine-tune Hugging Face models."""
