"""The command line: words for people. One module per command."""
