"""Read text with any model: text streams, readers, statistics over a corpus, and maps for the viewer."""
