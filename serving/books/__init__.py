"""Books: how they are read, and how their speech becomes a file with chapter marks. `zoo audiobook` and the works of
a server (serving/http/works) share this."""
