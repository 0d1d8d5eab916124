"""Programs that put load on a server and print what they measured."""
