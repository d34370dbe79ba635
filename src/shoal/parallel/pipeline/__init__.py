"""`pp`: blocks divided over ranks, microbatches pipelined through them."""
