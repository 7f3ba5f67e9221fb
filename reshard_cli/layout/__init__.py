"""From a checked document and a model to the pieces that every rank holds, as arrays."""
