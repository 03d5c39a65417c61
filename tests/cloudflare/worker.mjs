// The routes of Cloudflare's public KV API on top of a KV binding, for tests of the adapter. The binding implements the
// rules: valid keys, the minimum time to live, pages of lists, and expiration. Miniflare's API for KV ignores
// `expiration_ttl`.
//
// https://developers.cloudflare.com/api/resources/kv/subresources/namespaces/

const ROUTE = /^\/client\/v4\/accounts\/([^/]+)\/storage\/kv\/namespaces\/([^/]+)\/(?:values\/(.+)|keys)$/;

export default {
  async fetch(request, env) {
    const url = new URL(request.url);
    const [matched, account, namespace, key] = ROUTE.exec(url.pathname) ?? [];
    if (request.headers.get("authorization") !== `Bearer ${env.TOKEN}`) {
      return failure(401, 10000, "Authentication error");
    }
    if (!matched || account !== env.ACCOUNT || namespace !== env.NAMESPACE) {
      return failure(404, 10013, "namespace not found");
    }
    try {
      return key === undefined ? await list(env.KV, url) : await value(env.KV, decodeURIComponent(key), url, request);
    } catch (error) {
      // For example: KV PUT failed: 400 Invalid expiration_ttl of 59. …
      const [, status, message] = /failed: (\d+) (.*)/.exec(error.message) ?? [null, 500, error.message];
      return failure(Number(status), 10001, message);
    }
  },
};

async function value(kv, key, url, request) {
  if (request.method === "PUT") {
    const ttl = url.searchParams.get("expiration_ttl");
    await kv.put(key, await request.text(), ttl === null ? {} : { expirationTtl: Number(ttl) });
    return success({});
  }
  if (request.method === "DELETE") {
    await kv.delete(key);
    return success({});
  }
  const found = await kv.get(key);
  return found === null ? failure(404, 10009, "get: 'key not found'") : new Response(found);
}

async function list(kv, url) {
  const options = Object.fromEntries(url.searchParams);
  const page = await kv.list({ ...options, limit: Number(options.limit ?? 1000) });
  return success(page.keys, { count: page.keys.length, cursor: page.list_complete ? "" : page.cursor });
}

function success(result, resultInfo) {
  return Response.json({ success: true, errors: [], messages: [], result, result_info: resultInfo });
}

function failure(status, code, message) {
  return Response.json({ success: false, errors: [{ code, message }], messages: [], result: null }, { status });
}
