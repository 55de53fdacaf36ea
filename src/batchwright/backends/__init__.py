"""What turns a batch into outputs: embeddings by an encoder, static generation by transformers."""
