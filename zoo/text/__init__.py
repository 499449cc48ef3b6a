"""Text before the model: pieces of long text, numbers in words, text that is still arriving."""
