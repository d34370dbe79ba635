"""One optimizer step: microbatches, gradients, the update, and what is known of it afterwards."""
