"""What a trainer's gradient may be: losses, and errors in computing them."""
