"""The requests in flight, as the control API and the console show them. It changes none of them."""
