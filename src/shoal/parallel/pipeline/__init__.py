"""`pp`: blocks divided over ranks, microbatches travelling through them."""
