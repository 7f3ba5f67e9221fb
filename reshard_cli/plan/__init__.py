"""The intersection of two layouts: who sends which bytes to whom, in which round."""
