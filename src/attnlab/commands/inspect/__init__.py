"""attnlab inspect: show what any model attends to, by weights and by norms, on a text or over a corpus."""
