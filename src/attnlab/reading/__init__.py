"""Reading text with any model: text streams, readers, surveys over a corpus, and the maps to show."""
