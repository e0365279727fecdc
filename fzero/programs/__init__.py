"""Programs as data: taken apart, divided by where their leaves live, run anew."""
