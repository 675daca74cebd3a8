"""What a Record means: each analysis reads a Record and returns a table; none imports a model."""
