"""Labels of the images of a folder."""
