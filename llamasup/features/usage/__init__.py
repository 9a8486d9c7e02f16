"""What each model, key and day has used: requests, tokens, slot seconds and energy."""
