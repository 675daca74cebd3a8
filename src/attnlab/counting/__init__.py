"""Models of word counts: co-occurrence, IBM Model 1, the bag-of-words proxy, and the diagnosis of a corpus."""
