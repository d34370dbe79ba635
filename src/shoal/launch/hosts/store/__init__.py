"""The store through which ranks of several hosts find each other, behind authenticated connections."""
