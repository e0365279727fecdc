"""What layers exchange along the axes that divide them."""
