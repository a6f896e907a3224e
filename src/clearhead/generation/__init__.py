"""Text as it is generated: token by token, many requests at once, with what each new token looked at."""
