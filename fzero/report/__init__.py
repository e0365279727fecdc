"""What a plan or a state is made of, for people: description, placement, layout."""
