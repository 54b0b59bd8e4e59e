"""Where models come from: directories, files, named models and the hub."""
