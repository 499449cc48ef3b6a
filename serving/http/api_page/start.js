// Shows this server's schema. Addresses are relative, so that the page works behind a proxy's path.
SwaggerUIBundle({
  url: 'schema/openapi.json',
  dom_id: '#api',
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  tryItOutEnabled: true,
  validatorUrl: null,
});
