"""One script a question; each prints our number beside a reference. ``README.md`` lists them."""
