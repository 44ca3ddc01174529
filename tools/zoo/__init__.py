"""Every model of transformers that can be built without a download, tiny, under tilewise's attention."""
