"""What a run left behind, for people: its `files` read, a `page` of `pictures`, a `trace`."""
