"""Starting and ending a server and its processes."""
