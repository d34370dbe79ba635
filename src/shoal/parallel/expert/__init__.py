"""`ep`: experts divided over ranks, and the router that sends tokens to them."""
