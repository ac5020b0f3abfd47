"""The demo: solar cells from a public data set, told as a story of three days."""
