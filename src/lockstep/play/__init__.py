"""The playground: one page that trains a small network by several workers in the browser, and shows what travels."""
